"""The target model: loading, key-value cache, attention masks and passes over draft trees."""
