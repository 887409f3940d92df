"""The planners, splits and overlaps of moesys: of each kind the name of its class and the module that has it.

A module is imported when its kind is named, so that declaring a strategy loads no planner but its own.
"""

BALANCES = {
    "static": ("Static", "moesys.balance.static"),
    "eplb": ("Eplb", "moesys.balance.eplb"),
    "laer": ("Laer", "moesys.balance.laer"),
    "flex_moe": ("FlexMoe", "moesys.balance.flex_moe"),
    "greedy": ("Greedy", "moesys.balance.greedy.greedy"),
    "cp_sat": ("CpSat", "moesys.balance.cp_sat"),
    "moon_ep": ("MoonEp", "moesys.balance.moon_ep"),
    "llep": ("Llep", "moesys.balance.llep"),
    "ultra_ep": ("UltraEp", "moesys.balance.ultra_ep"),
    "faster_moe": ("FasterMoe", "moesys.balance.faster_moe"),
}
SPLITS = {
    "even": ("EvenSplit", "moesys.balance.even_split"),
    "proportional": ("Proportional", "moesys.balance.proportional_split"),
    "flow": ("FlowSplit", "moesys.balance.flow.flow_split"),
    "quotas": ("Quotas", "moesys.balance.quotas"),
}
OVERLAPS = {
    "sequential": ("Sequential", "moesys.config.overlap"),
    "pipelined": ("Pipelined", "moesys.config.overlap"),
    "mega_kernel": ("MegaKernel", "moesys.config.overlap"),
}
