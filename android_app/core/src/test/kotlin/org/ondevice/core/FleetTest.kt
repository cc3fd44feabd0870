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

    private val unused: () -> FleetWork = { throw AssertionError("computed a reply again") }

    private fun refusal(action: () -> Any?) = assertThrows(OndeviceException::class.java) { action() }.what

    /** After all rounds: the same file gets the same bytes without a computation; another task of its round, nothing. */
    private fun assertOneReply(home: File) {
        val asked = file("round-4-0")
        val parcel = FleetFile.read(asked, "x")
        assertArrayEquals(file("answer-4"), FleetDevice(home).take(asked, "round.odfleet", work = unused).answer)
        val task = parcel.task!!
        val charter = FleetCharter((said["charter"] as String).toByteArray())
        val begin = 11 // after mark, version, kind, fleet and round
        val other = task.copyOf().also { it[begin] = (it[begin] + 1).toByte() }
        val ledger = FleetLedger(File(home, FleetLedger.FILE_NAME))
        assertTrue("another task" in refusal { ledger.once(FleetTask.read(other), other, 0.0) { ByteArray(0) } })
        val steps = task.copyOf().also { it[begin + 8] = (it[begin + 8] + 1).toByte() }
        assertTrue("local steps" in refusal { charter.check(FleetTask.read(steps)) })
        val rate = task.copyOf().also { it[it.size - 2] = (it[it.size - 2] + 1).toByte() }
        assertTrue("learning rate" in refusal { charter.check(FleetTask.read(rate)) })
        Storage.deleteTree(FleetDevice.folder(home)) // the phone leaves the fleet, and comes back
        assertTrue("another task" in refusal { FleetLedger(File(home, FleetLedger.FILE_NAME)).once(FleetTask.read(other), other, 0.0) { ByteArray(0) } })
    }

    @Test
    fun aPhoneStopsAtItsPrivacyBudgetOverAllFleets() {
        val file = File(Fixtures.scratch(), FleetLedger.FILE_NAME)
        fun task(fleet: Int, round: Int) = FleetTask(fleet, round, ByteArray(8), 0, 1, 1f)
        var replies = 0
        val refused = refusal {
            while (replies < 1000) {
                FleetLedger(file).once(task(replies % 3, replies), byteArrayOf(1), 8.0) { byteArrayOf(7) }
                replies++
            }
        }
        assertTrue("privacy budget" in refused)
        // rho + 2 sqrt(rho ln 1e5) is 7.9 at rho = 1.03, which 33 replies of 2 / 64 reach; Python's bound is the same.
        assertEquals(33, replies)
        assertTrue("privacy budget" in refusal { FleetLedger(file).once(task(9, 0), byteArrayOf(1), 8.0) { byteArrayOf(7) } })
        assertArrayEquals(byteArrayOf(7), FleetLedger(file).once(task(0, 0), byteArrayOf(1), 8.0) { throw AssertionError() })
        file.writeText("{")
        assertTrue("is damaged" in refusal { FleetLedger(file) })
    }

    @Test
    fun aReplyIsSignedByTheKeyThatTheCharterNames() {
        val home = Fixtures.scratch()
        val key = FleetKey.open(home)
        val fingerprint = Storage.sha256(key.public)
        val named = (said["charter"] as String).replaceFirst("{", "{\"device_keys\":[\"$fingerprint\"],")
        FleetCharter(named.toByteArray()).check(FleetKey.open(home))
        assertTrue("does not know this phone's key" in refusal { FleetCharter(named.toByteArray()).check(FleetKey.open(Fixtures.scratch())) })
        val reply = byteArrayOf(1, 2, 3)
        val signed = key.sign(reply)
        val public = java.security.KeyFactory.getInstance("EC").generatePublic(java.security.spec.X509EncodedKeySpec(signed.signer))
        val check = java.security.Signature.getInstance("SHA256withECDSA").apply { initVerify(public) }
        check.update("ondevice-fleet-answer-1\u0000".toByteArray() + reply)
        assertTrue(check.verify(signed.signature))
        // Python reads both: `tests/fleet/test_keys_of_phones.py`.
        val out = File("target/signed").apply { mkdirs() }
        File(out, "phone.pub").writeText(key.openSsh("phone"))
        File(out, "reply.odfleet").writeBytes(FleetFile(device = 3, answer = reply, signed = signed).toBytes())
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
        assertOneReply(folder)
        val changed = (said["charter"] as String).replace("\"noise\":\"rademacher\"", "\"noise\":\"gaussian\"")
        assertTrue(assertThrows(OndeviceException::class.java) { FleetCharter(changed.toByteArray()) }.what.contains("signs alone"))
        val judged = (said["charter"] as String).replace("\"noise\":", "\"objective\":{\"name\":\"dpo\"},\"noise\":")
        assertTrue(assertThrows(OndeviceException::class.java) { FleetCharter(judged.toByteArray()) }.what.contains("from preferences"))
        val broken = file("round-1-0").also { it[20] = (it[20] + 1).toByte() }
        assertTrue(assertThrows(OndeviceException::class.java) { FleetFile.read(broken, "x") }.what.contains("damaged"))
    }
}
