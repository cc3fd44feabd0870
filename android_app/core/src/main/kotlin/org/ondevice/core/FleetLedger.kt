package org.ondevice.core

import java.io.File
import kotlin.math.ln
import kotlin.math.sqrt

/**
 * Records which tasks this phone has answered: each once, so that no repetition averages its noise away.
 *
 * If a server asks for the same again it gets the same bytes; for another task of the same round it gets nothing. The
 * record is written before a reply leaves. It also holds what all replies cost in privacy, whatever fleets they went to:
 * it lies outside the fleet's folder and outlives leaving the fleet. Python's counterpart is `ondevice/fleet/ledger.py`.
 */
class FleetLedger(private val file: File) {
    private class Entry(val fleet: Int, val round: Int, val request: String, val cost: Double, val reply: String?)

    private val entries: MutableList<Entry> = read()

    /**
     * Return the reply to a request: the one that was given, or a new one, which is recorded first.
     *
     * @param request everything that the reply depends on, as the server sent it.
     * @param noiseMultiplier of the charter; 0 without noise.
     * @param reply makes a new one.
     * @throws OndeviceException another task of this round was answered, its bytes were deleted, or the privacy budget
     *   is spent.
     */
    fun once(task: FleetTask, request: ByteArray, noiseMultiplier: Double, reply: () -> ByteArray): ByteArray {
        val digest = Storage.sha256(task.begin + request)
        entries.firstOrNull { it.fleet == task.fleet && it.round == task.round }?.let { known ->
            if (known.request != digest) {
                throw fleetError(
                    "round ${task.round} was answered to another task", "the task that was answered", "another one, from ${Storage.hex(task.begin)}",
                )
            }
            return Storage.bytes(known.reply ?: throw fleetError("round ${task.round} was answered, and the reply is no longer stored"))
        }
        val cost = if (noiseMultiplier == 0.0) 0.0 else 1 / (noiseMultiplier * noiseMultiplier)
        checkBudget(cost)
        val new = reply()
        entries += Entry(task.fleet, task.round, digest, cost, Storage.hex(new))
        write(task.fleet, task.round)
        return new
    }

    /** Refuse a reply that would exceed the budget; without noise there is no epsilon to keep. */
    private fun checkBudget(cost: Double) {
        if (cost == 0.0) return
        // Zero-concentrated differential privacy adds up over replies; Bun and Steinke, 2016, proposition 1.3.
        val rho = 2 * (entries.sumOf { it.cost } + cost)
        val spent = rho + 2 * sqrt(rho * ln(1 / DELTA))
        if (spent > BUDGET) {
            throw fleetError(
                "one more reply would exceed this phone's privacy budget", "epsilon of at most $BUDGET at delta $DELTA",
                "epsilon ${"%.3g".format(java.util.Locale.ROOT, spent)}", "more noise in the charter makes the budget last longer",
            )
        }
    }

    private fun write(fleet: Int, round: Int) {
        val values = entries.map {
            val reply = it.reply.takeUnless { _ -> it.fleet == fleet && it.round <= round - KEEP_ROUNDS }
            linkedMapOf("fleet" to it.fleet.toLong(), "round" to it.round.toLong(), "request" to it.request, "cost" to it.cost, "reply" to reply)
        }
        Storage.atomicWrite(file, Json.write(linkedMapOf("version" to VERSION, "answered" to values)))
    }

    private fun read(): MutableList<Entry> {
        if (!file.isFile) return ArrayList()
        try {
            val value = Json.parse(Storage.decode(file.readBytes())) as Map<*, *>
            require(value["version"] == VERSION)
            return (value["answered"] as List<*>).mapTo(ArrayList()) { row ->
                row as Map<*, *>
                Entry(
                    (row["fleet"] as Long).toInt(), (row["round"] as Long).toInt(), row["request"] as String,
                    (row["cost"] as Number).toDouble(), row["reply"] as String?,
                )
            }
        } catch (_: Exception) {
            // Without the record nobody knows what was answered: a new one would open the way for repetition.
            throw fleetError("${file.name} is damaged, so this phone answers no fleet", hint = "delete the app's data to begin anew")
        }
    }

    companion object {
        const val FILE_NAME = "fleet answered.json"
        private const val VERSION = 1L

        /** Rounds whose replies are stored as bytes: as many as a fleet may have open. */
        private const val KEEP_ROUNDS = 64

        /** Epsilon at which a phone stops, over all its fleets. */
        private const val BUDGET = 8.0
        private const val DELTA = 1e-5
    }
}
