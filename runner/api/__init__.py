"""The HTTP surface: OpenAI's shapes in and out. Knows the EngineClient and nothing below it."""
