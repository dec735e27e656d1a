"""Turns logits into tokens: penalties, filters, random sampling, structured output."""
