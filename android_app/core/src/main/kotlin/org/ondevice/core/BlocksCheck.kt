package org.ondevice.core

/** What must agree in the manifest of a block program, so that a wrong one is refused before a step. */
internal object BlocksCheck {
    private val ONE = listOf(1)

    fun check(manifest: Manifest) {
        val spec = manifest.spec
        val layers = spec.blocks!!.layers
        for (tensor in spec.state) {
            if (tensor.shape.size != 1 || tensor.shape[0] % layers != 0) {
                throw ManifestCheck.wrong("program_spec.state.${tensor.name}", "$layers equal ranges", tensor.shape)
            }
        }
        if (manifest.lengthsTokens.isEmpty()) throw ManifestCheck.wrong("lengths_tokens", "at least one length", "none")
        val sums = ManifestCheck.method(spec, BlockSteps.HEAD_SUMS)
        val rows = sums.inputs.firstOrNull { it.role == Role.HIDDEN }?.shape
        if (rows?.size != 2) throw ManifestCheck.wrong("program_spec.methods.${BlockSteps.HEAD_SUMS}.inputs", "hidden states of a number of positions", sums.inputs)
        val tile = sums.inputs.lastOrNull { it.role == Role.FROZEN }?.shape ?: emptyList()
        if (tile.isEmpty() || tile[0] > spec.blocks.vocab) {
            throw ManifestCheck.wrong("program_spec.methods.${BlockSteps.HEAD_SUMS}.inputs", "a tile of at most ${spec.blocks.vocab} rows", tile)
        }
        Shapes(spec, rows!!, tile[0]).check(manifest)
    }

    private class Shapes(val spec: ProgramSpec, val head: List<Int>, val tileRows: Int) {
        private val writes = BlockSteps.HEAD_LOGITS in spec.methods
        private val width = head[1]

        /** Of what each layer reads of its tokens; null where no layer does. */
        private val inputWidth = spec.methods.entries.firstOrNull { it.key.startsWith(BlockSteps.LAYER_INPUT) }
            ?.value?.outputs?.firstOrNull { it.role == Role.LAYER_INPUT }?.shape?.getOrNull(1)

        /** The ends of the names of a block's functions, one for each kind of block. */
        private val ends = (0 until spec.blocks!!.layers).map(spec.blocks::endOfName).distinct()

        fun check(manifest: Manifest) {
            for (length in manifest.lengthsTokens) {
                val alone = if (writes && length == manifest.longestTokens) setOf(1) else emptySet()
                for (rows in setOf(manifest.batchSize, manifest.evalBatchSize) + alone) {
                    val size = BlockSteps.sizeOf(rows, length)
                    val hidden = listOf(rows * length, width)
                    method("${BlockSteps.EMBED}$size", hidden, listOf(rows, length), Role.IDS to 1, gives = setOf(Role.HIDDEN))
                    for (end in ends) method("${BlockSteps.FORWARD}$size$end", hidden, null, Role.HIDDEN to 1, Role.STATE to 1, gives = setOf(Role.HIDDEN), lends = true)
                    if (inputWidth != null) {
                        method("${BlockSteps.LAYER_INPUT}$size", hidden, listOf(rows, length), Role.IDS to 1, Role.HIDDEN to 1, gives = setOf(Role.LAYER_INPUT))
                    }
                    shared(size)
                }
                val hidden = listOf(manifest.batchSize * length, width)
                val state = spec.state.size
                val takes = arrayOf(Role.HIDDEN to 1, Role.GRADIENT to 1, Role.STATE to state)
                val backward = "${BlockSteps.BACKWARD}${BlockSteps.sizeOf(manifest.batchSize, length)}"
                for (end in ends) method("$backward$end", hidden, null, *takes, gives = setOf(Role.GRADIENT, Role.STATE), lends = true)
            }
            val places = arrayOf(Role.HIDDEN to 1, Role.TARGETS to 1, Role.TILE_FIRST to 1, Role.TILE_SKIP to 1, Role.TILE_SUMS to BlockSteps.SUMS.size)
            method(BlockSteps.HEAD_SUMS, head, null, *places, gives = setOf(Role.TILE_SUMS))
            method(BlockSteps.HEAD_GRADIENT, head, null, *places, Role.TOKEN_SCALE to 1, Role.GRADIENT to 1, gives = setOf(Role.GRADIENT))
            if (writes) method(BlockSteps.HEAD_LOGITS, listOf(1, width), null, Role.HIDDEN to 1, gives = setOf(Role.LOGITS))
            if (CachedReader.BLOCK_DECODE in spec.methods) cached()
        }

        /** What a block reads of an earlier one was given by it, in the same shape. */
        private fun shared(size: String) {
            val given = HashMap<Key, List<Int>>()
            for (layer in 0 until spec.blocks!!.layers) {
                val name = "${BlockSteps.FORWARD}$size${spec.blocks.endOfName(layer)}"
                val method = ManifestCheck.method(spec, name)
                for (port in method.inputs) if (port.role.isShared && given[Key.of(port)] != port.shape) {
                    throw ManifestCheck.wrong("program_spec.methods.$name.inputs", "what a block before layer $layer gives", port)
                }
                for (port in method.outputs) if (port.role.isShared) given[Key.of(port)] = port.shape
            }
        }

        /** The functions that keep keys [heads, width, context] and values [heads, context, width]. */
        private fun cached() {
            if (spec.blocks!!.kinds.isNotEmpty() || inputWidth != null) {
                throw ManifestCheck.wrong("program_spec.kinds", "blocks of one kind, where they keep keys and values: export without context_tokens", spec.blocks.kinds)
            }
            val where = "program_spec.methods.${CachedReader.BLOCK_DECODE}.inputs"
            val inputs = ManifestCheck.method(spec, CachedReader.BLOCK_DECODE).inputs
            val (heads, wide, context) = inputs.firstOrNull { it.role == Role.KEYS }?.shape?.takeIf { it.size == 3 }
                ?: throw ManifestCheck.wrong(where, "keys of three dimensions", inputs)
            val chunk = ManifestCheck.method(spec, CachedReader.EMBED_PREFILL).inputs.firstOrNull { it.role == Role.IDS }?.shape?.last() ?: 0
            if (chunk < 2 || !writes) throw ManifestCheck.wrong("program_spec.methods", "${BlockSteps.HEAD_LOGITS}, and ids of several tokens", spec.methods.keys)
            val places = arrayOf(Role.HIDDEN to 1, Role.POSITION to 1, Role.KEYS to 1, Role.VALUES to 1, Role.STATE to 1)
            for ((embed, block, tokens) in listOf(
                Triple(CachedReader.EMBED_PREFILL, CachedReader.BLOCK_PREFILL, chunk), Triple(CachedReader.EMBED_DECODE, CachedReader.BLOCK_DECODE, 1),
            )) {
                val hidden = listOf(tokens, width)
                method(embed, hidden, listOf(1, tokens), Role.IDS to 1, gives = setOf(Role.HIDDEN))
                val kept = { length: Int -> mapOf(Role.KEYS to listOf(heads, wide, length), Role.VALUES to listOf(heads, length, wide)) }
                method(block, hidden, null, *places, gives = setOf(Role.HIDDEN, Role.KEYS, Role.VALUES), kept = listOf(kept(context), kept(tokens)))
            }
        }

        /** The method takes these roles as often as said, gives those, and all have the shapes that the host has. */
        private fun method(
            name: String, hidden: List<Int>, ids: List<Int>?, vararg takes: Pair<Role, Int>, gives: Set<Role>,
            kept: List<Map<Role, List<Int>>> = listOf(emptyMap(), emptyMap()), lends: Boolean = false,
        ) {
            val method = ManifestCheck.method(spec, name)
            for ((where, ports, own) in listOf(Triple("inputs", method.inputs, kept[0]), Triple("outputs", method.outputs, kept[1]))) {
                for (port in ports) if (port.role != Role.FROZEN) shape("program_spec.methods.$name.$where", port, hidden, ids, own)
            }
            for ((role, count) in takes) {
                val received = method.inputs.count { it.role == role }
                if (received != count) throw ManifestCheck.wrong("program_spec.methods.$name.inputs", "$count of role ${role.manifestName}", received)
            }
            val received = method.outputs.map { it.role }.filterNot { lends && it.isShared }.toSet()
            if (received != gives) throw ManifestCheck.wrong("program_spec.methods.$name.outputs", gives.joinToString { it.manifestName }, received.map { it.manifestName })
            val state = method.outputs.filter { it.role == Role.STATE }.map { it.name }.toSet()
            if (Role.STATE in gives && state != spec.state.map { it.name }.toSet()) {
                throw ManifestCheck.wrong("program_spec.methods.$name.outputs", "the state ${spec.state.map { it.name }}", state)
            }
        }

        private fun shape(where: String, port: Port, hidden: List<Int>, ids: List<Int>?, kept: Map<Role, List<Int>>) {
            val positions = listOf(head[0])
            val expected = when (port.role) {
                Role.IDS -> ids?.let { DType.INT64 to it }
                Role.HIDDEN, Role.GRADIENT -> DType.FLOAT32 to hidden
                Role.STATE -> spec.state.firstOrNull { it.name == port.name }?.let { it.dtype to listOf(it.shape[0] / spec.blocks!!.layers) }
                Role.COUNTER -> if (spec.counters.any { it.name == port.name }) DType.INT64 to ONE else null
                Role.CONSTANT -> if (spec.constants.any { it.name == port.name }) DType.FLOAT32 to ONE else null
                Role.TARGETS -> DType.INT64 to positions
                Role.TOKEN_SCALE -> DType.FLOAT32 to positions
                Role.TILE_SUMS -> if (port.name in BlockSteps.SUMS) DType.FLOAT32 to positions else null
                Role.KEYS, Role.VALUES -> kept[port.role]?.let { DType.FLOAT32 to it }
                Role.TILE_FIRST, Role.TILE_SKIP, Role.SEED, Role.POSITION -> DType.INT64 to ONE
                Role.LEARNING_RATE -> DType.FLOAT32 to ONE
                Role.LOSS_SCALE -> if (spec.blocks!!.lossScale == null) null else DType.FLOAT32 to ONE
                Role.LOGITS -> DType.FLOAT32 to listOf(1, tileRows)
                Role.LAYER_INPUT -> inputWidth?.let { DType.FLOAT32 to listOf(hidden[0], it) }
                Role.SHARED_KEYS, Role.SHARED_VALUES, Role.KEYS_GRADIENT, Role.VALUES_GRADIENT ->
                    DType.FLOAT32 to port.shape.takeIf { it.size == 4 && it[0] * it[1] == hidden[0] }.orEmpty()
                else -> null
            } ?: throw ManifestCheck.wrong(where, "only ports that the app can bind, each state and counter by its name", port)
            if (port.dtype to port.shape != expected) throw ManifestCheck.wrong("$where.${port.name}", "${expected.first.manifestName} ${expected.second}", port)
        }
    }
}
