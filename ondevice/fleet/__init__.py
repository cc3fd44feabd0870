"""A fleet: many devices train one adapter and send only numbers (develop/fleet-protocol.md is the
protocol).

The room's lower half is pure and needs nothing but numpy: `numbers` and `messages` are what is
sent, `noise` the directions, `state` the adapter in whole numbers, `combine` how a server combines
replies, `agreement` and `charter` what all agree on, `rounds` a server's decisions, `log` the file
that replays. Above it: `store` keeps a server's or a device's state in SQLite, `member` is a device
over any session and `frozen` takes it through a gradient's subspaces, `simulate` runs a fleet in
one process. Over Flower `apps` is the server's end, `client` the device's, `engine` both in Ray's
actors."""
