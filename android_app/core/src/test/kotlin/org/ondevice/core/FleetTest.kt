package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File

/** A phone in a mixed fleet of Python's, 20 rounds as files (`fleet_rounds.py`). */
class FleetTest {
    private val place = File(Fixtures.folder, "fleet")
    private val said = Fixtures.json("fleet/fleet.json") as Map<*, *>
    private val artifact by lazy { Artifact.open(File(Fixtures.folder, "fleet artifact")) }

    private fun file(name: String) = File(place, "$name.odfleet").readBytes()

    private fun bytes(hex: String) = hex.chunked(2).map { it.toInt(16).toByte() }.toByteArray()

    @Test
    fun theMessagesHaveTheBytesOfTheReference() {
        val task = FleetTask.read(bytes("d7010104030201050000000001020304050607280000000000000008000000803a"))
        assertEquals(listOf(0x01020304, 5, 8), listOf(task.fleet, task.round, task.localSteps))
        assertEquals(40L, task.firstStep)
        assertEquals(1f / 1024, task.learningRate)
        val numbers = FleetNumbers(shortArrayOf(1, -2, 32767), -9)
        assertArrayEquals(
            bytes("d70102040302010500000000010203040506070300000000000000100000000000003ff703000100feffff7f"),
            FleetAnswer(task, 3, 16, 0.5f, numbers).toBytes(),
        )
        val outcome = FleetEvent.read(bytes("d701030403020105000000000102030405060708090a0b0c0d0e0f01002800000000000000e20200fbff0700"))
        val group = outcome.groups!!.single()
        assertEquals(40L, group.firstStep)
        assertEquals(listOf<Short>(-5, 7), group.coefficients.mantissas.toList())
        assertEquals(-30, group.coefficients.exponent)
        val packed = FleetNumbers.pack(doubleArrayOf(1.0 / 512, -2.0 / 512, 32767.0 / 512))
        assertEquals(numbers.mantissas.toList() to numbers.exponent, packed.mantissas.toList() to packed.exponent)
        assertEquals(listOf(-4, 16384), FleetNumbers.pack(doubleArrayOf(1023.99)).let { listOf(it.exponent, it.mantissas[0].toInt()) })
        for (cut in listOf(0, 10, 20, 32)) assertThrows(OndeviceException::class.java) { FleetTask.read(bytes("d7010104030201050000000001020304050607280000000000000008000000803a").copyOf(cut)) }
    }

    @Test
    fun aPhoneGivesPythonsAnswersAndEndsWithItsHash() {
        val rounds = (said["rounds"] as Long).toInt()
        val away = Fixtures.ints(said["away"]).toSet()
        val hashes = said["hashes"] as List<*>
        val folder = Fixtures.scratch()
        PipeProgram(artifact.folder, Fixtures.python, Fixtures.root).use { program ->
            val session = Session(artifact, program)
            val tokenizer = artifact.tokenizer()
            val rows = Encoder(tokenizer, artifact.manifest.longestTokens)
                .encode(RowReader.read(File(Fixtures.folder, "train.jsonl"), artifact.manifest.task)).items.map { it.example }
            var device = FleetDevice(folder)
            fun take(data: ByteArray) = device.take(data, "round.odfleet") { FleetWork(session, rows, tokenizer.padId) }
            assertTrue(assertThrows(OndeviceException::class.java) { take(file("round-1-0")) }.what.contains("in no fleet yet"))
            for (number in 0 until rounds) {
                if (number in away) continue
                if (number % 7 == 6) device = FleetDevice(folder) // the app was killed
                if (number == 8) assertTrue(assertThrows(OndeviceException::class.java) { take(file("round-9-0")) }.what.contains("does not follow"))
                val files = place.listFiles()!!.filter { it.name.startsWith("round-$number-") }.sorted()
                val taken = files.map { take(it.readBytes()) }
                assertArrayEquals(file("answer-$number"), taken.last().answer, "round $number")
                if (number > 0) assertEquals(hashes[number - 1], taken.last().hash)
                if (number == 4) assertArrayEquals(taken.last().answer, take(files.last().readBytes()).answer, "a file that is taken twice")
            }
            val end = take(file("end-0")).hash
            val runtimes = listOfNotNull(
                "executorch python", "mlx signs", "torch-cpu float32", "torch-cpu nf4",
                "qnn-htp-simulator npu".takeIf { !File(Fixtures.folder, "npu.txt").isFile },
            )
            assertEquals(runtimes.associateWith { end }, said["ends"])
            assertEquals(hashes.last(), end)
            val adapter = (said["adapter"] as List<*>).map { (it as Number).toFloat() }.toFloatArray()
            assertArrayEquals(adapter, FleetDevice(folder).state!!.flat())
            assertEquals(18, said["rounds"].toString().toInt() - away.size)
        }
        val changed = (said["charter"] as String).replace("\"noise\":\"rademacher\"", "\"noise\":\"gaussian\"")
        assertTrue(assertThrows(OndeviceException::class.java) { FleetCharter(changed.toByteArray()) }.what.contains("signs alone"))
        val broken = file("round-1-0").also { it[20] = (it[20] + 1).toByte() }
        assertTrue(assertThrows(OndeviceException::class.java) { FleetFile.read(broken, "x") }.what.contains("damaged"))
    }
}
