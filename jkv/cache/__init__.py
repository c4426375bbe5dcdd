"""What a cache is, and where its arrays lie: values, a layer's config, codes, pages in the memory of the host."""
