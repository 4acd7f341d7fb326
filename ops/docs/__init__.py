"""Pages of docs/reference that are written from the code. Tests compare them with the files."""
