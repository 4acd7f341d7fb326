"""Autoscaling policy: figures of pools in, how many workers each is to have out. Pure."""
