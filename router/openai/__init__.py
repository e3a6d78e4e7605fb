"""OpenAI's dialect: what its requests mean to a front door, and how answers are written in it."""
