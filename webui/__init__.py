"""The web page: a Gradio form, and API routes for everything that updates while the page is open. Start reading at
`server.py`.

May import every backend module except backend.train and the command line; no backend module imports `webui`.
"""
