"""The version of headrace, which every manifest records."""

__version__ = "0.6.0"
