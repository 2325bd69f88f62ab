"""The page: a Gradio form and the routes of its own that live data comes by. Start reading at `server.py`.

Floor 6. May import everything below; nothing below imports it.
"""
