"""Packing: whole documents into samples of fixed length, best fit."""
