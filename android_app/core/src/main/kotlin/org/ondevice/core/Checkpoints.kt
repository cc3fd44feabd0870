package org.ondevice.core

import java.io.File
import java.io.IOException

/** An intact checkpoint: [step] steps are done, [state] is what [Session.state] gave. */
class Checkpoint(val folder: File, val step: Int, val state: Map<String, StoredTensor>, val score: List<Double>?)

/**
 * The checkpoints of a run, in the layout of `ondevice/training/checkpoint.py`: a folder `checkpoint-00000100` with
 * `state.safetensors` ([Session.state]) and `meta.json` (step, identity, best evaluation, SHA-256 of the state),
 * written beside and renamed. The position in the data and in the schedule is the step.
 *
 * The two newest and the best by evaluation are kept.
 *
 * @param identity the settings that make two runs the same run, manifest hash included; a checkpoint with others is foreign.
 */
class Checkpoints(
    private val folder: File,
    private val identity: Map<String, Any?>,
    private val backend: String = "executorch",
    private val keep: Int = 2,
) {
    /** All checkpoints by name, oldest first, whole or not. */
    fun folders(): List<File> = folder.listFiles { file -> file.isDirectory && NAME.matches(file.name) }?.sortedBy(::stepOf) ?: emptyList()

    /**
     * Write the checkpoint after [step] steps, then delete those that are no longer kept.
     *
     * @throws OndeviceException [ErrorKind.STORAGE] if the disk is full: the checkpoints before are as they were.
     */
    fun save(step: Int, state: Map<String, StoredTensor>, evaluation: EvalResult? = null): File {
        val target = File(folder, "checkpoint-" + step.toString().padStart(8, '0'))
        val bytes = Safetensors(state).toBytes()
        val meta = linkedMapOf(
            "schema" to SCHEMA_VERSION, "step" to step, "identity" to identity, "identity_sha256" to identitySha256(identity),
            "seed" to state.getValue("seed").longs!![0], "backend" to backend, "evaluation" to evaluation?.figures(), "score" to evaluation?.score,
            "state_sha256" to Storage.sha256(bytes),
        )
        Storage.atomicFolder(target) { partial ->
            File(partial, STATE).writeBytes(bytes)
            File(partial, META).writeText(Json.write(meta, " ") + "\n")
        }
        prune(step)
        return target
    }

    /**
     * The newest intact checkpoint, or null if there is none at all; [warn] is told of each damaged one.
     *
     * @throws OndeviceException [ErrorKind.CHECKPOINT]: the newest intact one is of another run, or all are damaged.
     */
    fun newest(warn: (String) -> Unit): Checkpoint? {
        val all = folders()
        for (path in all.reversed()) {
            try {
                return read(path)
            } catch (damaged: Damaged) {
                warn("${path.name} is damaged: ${damaged.message}; the checkpoint before it is used")
            }
        }
        if (all.isNotEmpty()) throw error("none of the ${all.size} checkpoints is whole", hint = "start the run again")
        return null
    }

    /** Score and folder of the best evaluation; the earliest of equals. */
    fun best(): Pair<List<Double>, File>? {
        var best: Pair<List<Double>, File>? = null
        for (path in folders()) {
            val score = try {
                score(meta(path))
            } catch (_: Damaged) {
                null
            } ?: continue
            val known = best
            if (known == null || compareScores(score, known.first) > 0) best = score to path
        }
        return best
    }

    /** Delete all checkpoints, also half written ones. */
    fun clear() {
        folders().forEach(Storage::deleteTree)
        removeLeftovers()
    }

    fun removeLeftovers() {
        folder.listFiles()?.filter { it.name.startsWith(".checkpoint-") && ".partial-" in it.name }?.forEach(Storage::deleteTree)
    }

    internal fun read(path: File): Checkpoint {
        val meta = meta(path)
        val state = File(path, STATE)
        val tensors = try {
            if (Storage.sha256(state) != meta["state_sha256"]) throw Damaged("$STATE is not what was written")
            Safetensors.read(state).tensors
        } catch (error: IOException) {
            throw Damaged("$STATE cannot be read: ${error.message}")
        } catch (error: OndeviceException) {
            throw Damaged(error.what)
        }
        checkIdentity(meta["identity"] as? Map<*, *> ?: throw Damaged("$META has no identity"), identity, path.name)
        return Checkpoint(path, (meta["step"] as? Long ?: throw Damaged("$META has no step")).toInt(), tensors, score(meta))
    }

    private fun meta(path: File): Map<*, *> {
        val values = try {
            Json.parse(Storage.readText(File(path, META))) as? Map<*, *> ?: throw Damaged("$META is no object")
        } catch (error: IOException) {
            throw Damaged("$META cannot be read: ${error.message}")
        } catch (error: JsonException) {
            throw Damaged("$META is not JSON: ${error.message}")
        }
        if (values["schema"] != SCHEMA_VERSION) {
            throw error("${path.name} is of another version", "schema $SCHEMA_VERSION", "schema ${describe(values["schema"])}", "use the app that wrote it")
        }
        return values
    }

    private fun score(meta: Map<*, *>): List<Double>? = (meta["score"] as? List<*>)?.map { (it as? Number)?.toDouble() ?: Double.NaN }

    private fun prune(step: Int) {
        val all = folders()
        val past = all.filter { stepOf(it) <= step }
        val kept = past.takeLast(keep) + listOfNotNull(best()?.second?.takeIf { it in past })
        all.filter { it !in kept }.forEach(Storage::deleteTree)
    }

    private class Damaged(message: String) : Exception(message)

    companion object {
        const val SCHEMA_VERSION = 1L
        private const val STATE = "state.safetensors"
        private const val META = "meta.json"
        private val NAME = Regex("checkpoint-[0-9]{8,}")

        private fun stepOf(path: File): Long = path.name.substringAfter('-').toLong()

        internal fun compareScores(left: List<Double>, right: List<Double>): Int {
            for (index in 0 until minOf(left.size, right.size)) {
                val order = left[index].compareTo(right[index])
                if (order != 0) return order
            }
            return left.size.compareTo(right.size)
        }

        internal fun identitySha256(identity: Map<String, Any?>): String =
            Storage.sha256(Json.write(sorted(identity)).toByteArray(Charsets.UTF_8))

        private fun sorted(value: Any?): Any? =
            if (value is Map<*, *>) value.entries.associate { it.key.toString() to sorted(it.value) }.toSortedMap() else value

        /** Compare two identities, both as JSON values, and name every setting that differs. */
        internal fun checkIdentity(found: Map<*, *>, expected: Map<String, Any?>, where: String) {
            val ours = flat(Json.parse(Json.write(expected)) as Map<*, *>)
            val theirs = flat(found)
            val differing = (ours.keys + theirs.keys).filter { ours[it] != theirs[it] }.sorted()
            if (differing.isEmpty()) return
            throw error(
                "$where belongs to another run: ${differing.joinToString(", ")}",
                differing.joinToString(", ") { "$it = ${ours[it] ?: "absent"}" },
                differing.joinToString(", ") { "$it = ${theirs[it] ?: "absent"}" },
                "go on with the settings and the data that the run was started with, or start a new run",
            )
        }

        private fun flat(values: Map<*, *>, prefix: String = ""): Map<String, Any?> = values.entries.flatMap { (key, value) ->
            if (value is Map<*, *>) flat(value, "$prefix$key.").toList() else listOf("$prefix$key" to value)
        }.toMap()

        private fun error(what: String, expected: String? = null, received: String? = null, hint: String? = null) =
            OndeviceException(ErrorKind.CHECKPOINT, what, expected, received, hint)
    }
}
