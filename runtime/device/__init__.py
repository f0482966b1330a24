"""Devices behind one small interface."""
