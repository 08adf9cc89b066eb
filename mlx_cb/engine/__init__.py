"""The engine: its loop, its worker process, and the handles that the front and Python code hold."""
