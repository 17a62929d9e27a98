"""The peers' compiled inner loops: plain arrays in, plain arrays out."""
