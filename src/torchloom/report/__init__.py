"""Draws records and measurements: SVG charts, an offline HTML page, a Perfetto trace. Opens without torch."""
