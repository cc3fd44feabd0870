"""Fleets of first-order devices: they send adapters, and the server averages them (FedAvg and its
kin).

`rules` is the arithmetic, bit for bit that of Flower's strategies; `charter` what such a fleet
agrees on; `arrays` how an adapter is named and sent; `store` the server's or a device's file;
`member` a device over any session; `simulate` a fleet in one process, with zeroth-order devices
among them if requested; `apps` the server over Flower, which runs Flower's own strategies."""
