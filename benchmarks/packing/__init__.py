"""How full placement packs a cluster, beside other policies, a bound and the optimum."""
