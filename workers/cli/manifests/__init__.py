"""Manifests for Kubernetes, made from the configuration of a cluster. Pure."""
