"""Measurements between two machines, published figures beside simulated ones, the demo's runs."""
