"""Files of KV blocks on an SSD: their format, their folder, and the threads that read and write.

Knows bytes by content hash; nothing about requests, models or MLX.
"""
