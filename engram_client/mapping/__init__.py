"""How a rank maps what it was handed: one file a kind of memory."""
