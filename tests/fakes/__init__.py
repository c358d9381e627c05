"""The only fakes there are: a core that counts cells for real over a made-up model, a clock, a text side."""
