"""The clusters that cells run on; each kind is one module behind ``interface``."""
