"""The site: configuration, directives and checks of its Sphinx build."""
