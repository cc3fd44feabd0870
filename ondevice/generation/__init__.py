"""Generate text: token by token, with caches, sampling, stop texts and chats."""
