"""The engine: scheduling, block management, paged attention and sampling. No Ray anywhere below here."""
