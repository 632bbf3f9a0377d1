class Recorder:
    def __init__(self, *args):
        pass

    def record(self, *args):
        pass
