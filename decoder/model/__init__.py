"""The target model: loading, KV cache, attention masks, and passes over draft trees."""
