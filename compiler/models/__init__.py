"""One architecture a file: configuration from metadata, graph in Relax."""
