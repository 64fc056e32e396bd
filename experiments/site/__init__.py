"""The site: configuration of its Sphinx build, and check of its links."""
