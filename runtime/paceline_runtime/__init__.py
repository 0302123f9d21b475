"""The runtime: an OpenAI-compatible server with continuous batching."""
