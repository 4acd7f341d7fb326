"""Network addresses: servers that clients name, and listening sockets."""
