"""Autoscaling policy: computes the sizes of pools from their figures. Pure."""
