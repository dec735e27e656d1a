"""Routes, middleware and ASGI responses."""
