"""The small pair that ships with the project, and one description per published pair."""
