"""Reading a compiled program's text, and what the tests ask of it."""
