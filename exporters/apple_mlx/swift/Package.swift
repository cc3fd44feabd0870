// swift-tools-version: 5.12
// NOT COMPILED where it was written: no Swift compiler and no Mac were at hand. exporters/apple_mlx/host does the same in
// C++ and is built and run by the tests; this package follows it file by file.

import PackageDescription

let package = Package(
    name: "OndeviceMLX",
    platforms: [.macOS("14.0"), .iOS(.v17)],
    products: [.library(name: "OndeviceMLX", targets: ["OndeviceMLX"])],
    dependencies: [
        // Its MLX must be the version that `program.json` names: a .mlxfn belongs to one version.
        .package(url: "https://github.com/ml-explore/mlx-swift", from: "0.30.0")
    ],
    targets: [
        .target(name: "OndeviceMLX", dependencies: [.product(name: "MLX", package: "mlx-swift")])
    ]
)
