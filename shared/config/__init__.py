"""Configuration: the schema of `pagemill.yaml`, and the parsing of the file."""
