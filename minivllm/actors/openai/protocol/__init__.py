"""Request and response bodies of the OpenAI API, checked by pydantic."""
