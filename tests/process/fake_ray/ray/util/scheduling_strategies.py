class PlacementGroupSchedulingStrategy:
    def __init__(self, group, placement_group_bundle_index):
        self.rank = placement_group_bundle_index
