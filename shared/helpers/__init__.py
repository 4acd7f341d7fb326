"""Small tools that are independent of the domain."""
