"""tinyllm: a course in code, and the libraries that it builds."""
