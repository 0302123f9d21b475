"""A development tool: an API server and a node agent on loopback, for the unchanged operator. Never a cluster."""
