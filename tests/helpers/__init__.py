"""Code that tests of several rooms share; it imports the package, never the other way round."""
