"""Publishing a trained model: what leaves the machine (contents.py), its model card (card.py), and the process that
uploads it to the Hugging Face Hub (hub.py) or copies it to a folder. The process is a job of a run, without torch."""
