"""Small tools without knowledge of the domain."""
