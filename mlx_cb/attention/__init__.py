"""Mechanism under the model: where keys and values live and how queries attend to them."""
