"""The configuration: the schema of `pagemill.yaml`, and the reading of the file."""
