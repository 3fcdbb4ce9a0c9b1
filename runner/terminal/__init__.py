"""The terminal chat. Knows the EngineClient and nothing below it."""
