"""The Batching Lab: small scenarios through the production scheduler, as pictures of slots over time; and its page.

`assets` alone is what a pod needs to show itself: it imports nothing of the scheduler or the twin.
"""
